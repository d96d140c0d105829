"""Evidence: several heads are judged by labelled images that are left out, and averaged."""
