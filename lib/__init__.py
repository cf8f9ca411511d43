"""What all scripts share."""
