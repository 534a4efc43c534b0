"""An update with dropout, added to what it updates."""
