//! The `outlast` program.
fn main() {}
