//! Being PID 1: signals, the child, the orphans, the terminal.

pub mod child;
pub mod first;
pub mod reap;
pub mod signals;
pub mod spawn;
pub mod terminal;
pub mod write;
