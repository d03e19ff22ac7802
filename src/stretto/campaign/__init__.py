"""Campaigns: many jobs, each with a fault of its own, and what guards have made of them."""
