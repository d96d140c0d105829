"""The page of `trident web`: a visitor's browser holds the pictures, this server labels them and keeps nothing.

Every request brings all it needs, class names, labelled pictures and the pile, and takes all of it away again. So there
is nothing to mix up between visitors and nothing to delete when they leave.
"""
