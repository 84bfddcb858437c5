"""Fused operators for MindSpore's CPU backend, compiled for the machine (`library`) and called from graphs
(`cells`)."""
