"""Faults at any place of a run, on any rank: each ends in one line, loses nothing that was saved, and hangs nothing."""
