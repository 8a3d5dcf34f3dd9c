"""The first hour on a node of 8 GPUs: everything that no test without GPUs can show, in the order in which it pays."""
