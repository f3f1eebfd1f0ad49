"""Whole fleets under load, faults and attacks, engines of others beside ours, and checks of the fleet model."""
