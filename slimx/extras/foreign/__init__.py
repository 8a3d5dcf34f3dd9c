"""Tables from names in slime, Megatron-LM, verl, TRL and OpenRLHF to keys of slimx. A refusal of such a name suggests
the key and its value; the tables of docs/guides/coming-from.md are generated from these."""
