//! At rest it costs nothing.
