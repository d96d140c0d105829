"""Few-shot episodes, the images and noise of a batch of tasks, views and augmentation."""
