//! End-to-end tests of Meshwright.
