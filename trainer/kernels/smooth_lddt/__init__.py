"""Smooth lDDT and its gradient, of which no pair is ever in memory."""
