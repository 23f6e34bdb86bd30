//! `outlast run` as an init, side by side with tini, dumb-init and catatonit.
//!
//! Each test is a row of the table in `docs/init.md`: what it observes of a program is compared with that program's
//! cell there. So the document says what is true of all of them, and a difference is a decision that it explains.
//!
//! Needs root, the static binary and three Debian packages: `scripts/test` has all of them.

#![allow(unreachable_pub, reason = "its modules are private all the same")]

mod table;

mod child;
mod process;
mod sys;

mod exits;
mod inherit;
mod reaping;
mod rest;
mod signals;
mod terminal;
mod trouble;
