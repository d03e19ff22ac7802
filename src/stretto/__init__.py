"""Stretto: data-parallel training that keeps every device busy and every replica honest."""
