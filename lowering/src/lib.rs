//! Plans to role programs.
