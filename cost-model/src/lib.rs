//! Seconds and bytes: compute, collectives, memory and the simulator.
