//! A Pod as a test fixture: two network namespaces joined by a veth, istio-init's redirection rules, a sidecar
//! (a real Envoy under a stand-in for pilot-agent) and an application as containers, kubelet's order of stopping,
//! and clients that count what they lose.
//!
//! ```no_run
//! use std::time::{Duration, Instant};
//! let pod = pod::Pod::builder()
//!     .sidecar(&["pilot-agent", "proxy", "sidecar"])
//!     .application(&["--listen", "0.0.0.0:8080"])
//!     .start()
//!     .unwrap();
//! let load = pod.load("http://10.9.0.2:8080/delay?ms=9000", pod::Pace::PerSecond(40));
//! load.hear_at(Instant::now() + Duration::from_secs(2));
//! let report = pod.stop(&pod::StopPlan::new(Duration::from_secs(30)));
//! let lost = load.finish().iter().filter(|r| r.result.is_err()).count();
//! ```
//!
//! Everything lives in namespaces that only the process's own descriptors keep alive: nothing is left on the host,
//! however the process ends (but an empty control group where a throttled Pod's was killed), and many Pods run side by side with the same addresses.

// A fixture fails by panicking, and its callers are tests.
#![allow(clippy::missing_panics_doc, clippy::missing_errors_doc, clippy::must_use_candidate)]

mod client;
mod container;
pub mod envoy;
mod group;
pub mod http;
pub mod http2;
mod kubelet;
mod log;
mod netns;
mod pod;
pub mod sockets;
mod space;
mod throttle;
mod upstream;

pub use client::{HALF_CLOSING, Load, Pace, Request, SlowReader};
pub use container::{Exit, Process, Status, instant, outlast};
pub use group::Group;
pub use kubelet::{ContainerReport, StopPlan, StopReport};
pub use log::{Line, Log};
pub use netns::istio_iptables;
pub use pod::{Builder, End, Pod};
pub use space::{AS_PROXY, Programs, Space, await_that, program};
pub use throttle::Throttle;
pub use upstream::{Sink, Upstream};

/// The Pod's addresses, and those of the clients on the other end of its veth.
pub const POD_V4: &str = "10.9.0.2";
pub const POD_V6: &str = "fd00:9::2";
pub const CLIENT_V4: &str = "10.9.0.1";
pub const CLIENT_V6: &str = "fd00:9::1";
/// The stand-in for pilot-agent talks nonsense on this port of the loopback, where it was told to.
pub const NONSENSE: u16 = 15053;
