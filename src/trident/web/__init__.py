"""The page of `trident web`. The visitor's browser holds the pictures; the server labels them and stores nothing.

Every request contains all that it needs: class names, labelled pictures and the pile. So the data of two visitors
cannot be mixed up, and nothing has to be deleted.
"""
