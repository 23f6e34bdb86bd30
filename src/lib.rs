//! outlast
