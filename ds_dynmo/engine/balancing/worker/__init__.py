"""The program of a :class:`DecisionProcess`: in a folder of its own, as Python looks there for modules first."""
