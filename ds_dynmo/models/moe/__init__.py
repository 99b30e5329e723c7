"""Mixture of experts: routing, experts as grouped products, experts spread over data-parallel replicas."""
