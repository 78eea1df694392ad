"""Tests of the alarms of a monitor: faults and healthy runs, stories with remedies, and runs unseen by the rules."""
