"""Running a schedule: one rank's program, its wires to the others, and the gradients that come of it."""
