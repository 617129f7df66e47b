"""Callbacks that count environment steps, record episodes, export policies or show the progress of a run."""
