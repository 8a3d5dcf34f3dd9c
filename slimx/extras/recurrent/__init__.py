"""Recurrent layers: gated delta nets and Mamba-2, and the families that contain them."""
