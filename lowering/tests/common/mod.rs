//! A small model, plans for it, and a referee that plays programs.
#![allow(dead_code, clippy::unwrap_used)]

pub mod model;
pub mod plans;
pub mod referee;
pub mod show;
