"""Device and graph-mode set-up, number formats, counter-based noise, probes, files, run logging, pictures.

Nothing is imported here: modules that need MindSpore import it themselves.
"""
