//! `outlast` lets a sidecar proxy outlast the application it serves.
//!
//! The way of the data, in one direction:
//!
//! ```text
//! arguments, environment ─ cli ─▶ Settings
//!                                    │
//! /proc/net/tcp, tcp6 ─ pod::proc_net ─▶ rows ─ pod::owners ─▶ holders ─ hold ─▶ look again at …, or release (reason)
//!                                                                │
//!                          run: forward the signal, exit with the child's status    prestop: exit code
//! ```
//!
//! [`hold`] and [`pod::owners`] never touch the kernel. [`pod::snapshot`] reads it through the trait
//! [`pod::kernel::Kernel`], [`watch`] gives it the clock and the log, [`run`] and [`prestop`] wait for the next look.
//! There is one thread.
// What would end PID 1, or write where a full pipe blocks it, is an error; a test may do so.
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::print_stderr,
        clippy::print_stdout,
        clippy::unwrap_used
    )
)]

pub mod app;
pub mod cli;
pub mod exit;
pub mod hold;
pub mod init;
pub mod install;
pub mod log;
pub mod pod;
pub mod poststart;
pub mod prestop;
pub mod proxy_api;
pub mod run;
pub mod status;
pub mod stop;
pub mod watch;
