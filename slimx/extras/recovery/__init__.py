"""Recovery of lost trainers in a run that goes on."""
