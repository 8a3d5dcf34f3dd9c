"""Names by which slime, Megatron-LM, verl, TRL and OpenRLHF call what a key of slimx says, as data: a refusal of one of
them names the key and its value, and the tables of docs/guides/coming-from.md are made of it."""
