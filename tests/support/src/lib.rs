//! A Pod as a test fixture.
