"""Early exit: tokens that a shallow layer is sure of leave, by CALM or ADP-C."""
