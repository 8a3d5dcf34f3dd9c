"""Section checkpoint: when a run is saved, what stays, and what is exported."""

from __future__ import annotations

from typing import Literal

from slimx.config.section import Amount, Count, Faults, Seconds, Section


class Checkpoint(Section):
    every: Count = 0
    """Steps between checkpoints; 0: by `every_seconds` alone, and at the end."""
    every_seconds: Seconds | None = 1800
    """Seconds after which the next step that ends is followed by a checkpoint, whatever `every` says: what a crash can
    cost; null: by `every` alone."""
    keep: Amount = 2
    """Newest checkpoints kept."""
    keep_every: Count = 0
    """Checkpoints of every so many steps are kept for good; 0: none is."""
    asynchronous: bool = True
    """Write files in the background from a copy in host memory, while the run goes on."""
    deadline: Seconds = 1800
    """Seconds until all files of a checkpoint must be on disk."""
    grace: Seconds | None = None
    """Seconds that SIGTERM, or SIGHUP, leaves for a checkpoint: the run saves and ends as after SIGUSR1, or without a
    checkpoint when they are over or a second signal comes; null: it ends at once."""
    verify: Literal["size", "full"] = "full"
    """Before a checkpoint is loaded, compare its files' sizes only, or their digests too."""
    damaged: Literal["skip", "stop"] = "skip"
    """Treatment of a newest checkpoint that is damaged when a run resumes: skip renames it to iter_NNNNNNN.damaged,
    says so and goes on from the one before, if there is one; stop refuses to start."""
    load_optimizer: bool = True
    """Resume with the optimizer's state; false: weights and position only, moments begin anew."""
    export_hf: bool = False
    """Write the final weights as a Hugging Face directory (RUN/hf)."""
    export_every: Count = 0
    """Steps between exports as Hugging Face directories (RUN/hf-NNNNNN, all kept); 0: none."""

    def _faults(self) -> Faults:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            yield (
                "checkpoint.keep_every",
                "checkpoint.keep_every",
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written "
                + (f"every {self.every} steps" if self.every else "by time and at the end only (checkpoint.every is 0)")
                + "; make it a multiple of checkpoint.every",
            )
