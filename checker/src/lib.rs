//! The referee: proves a plan and its programs correct.
