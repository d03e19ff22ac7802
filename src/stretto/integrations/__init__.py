"""Other trainers, with the communication of this library: one file for each, which needs that trainer's package."""
