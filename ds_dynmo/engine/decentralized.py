"""Diffusion as its authors mean it: stages exchange messages with their neighbours, nobody gathers anything."""
