"""Parts of a training step: updates, evaluation, measurements, reference."""
