"""Tables that map names in slime, Megatron-LM, verl, TRL and OpenRLHF to keys of slimx.

The error for such a name suggests the key and its value. The tables in docs/guides/coming-from.md are generated from
these."""
