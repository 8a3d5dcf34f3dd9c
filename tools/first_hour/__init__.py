"""The first hour on a node with 8 GPUs: everything that no test without GPUs can show, most valuable checks first."""
