//! Model files to graphs and weights.
