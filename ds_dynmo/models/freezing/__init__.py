"""Layer freezing: a growing prefix of layers stops learning, by schedule, AutoFreeze or Egeria."""
