"""Parts of a training step: optimizer steps, evaluation, measurements, and replacement of the reference."""
