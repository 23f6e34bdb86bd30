//! The Pod: its two networks and its two containers.

use crate::container::{Process, Spec, programs, repository};
use crate::log::{Line, Log};
use crate::netns::{self, Netns};
use crate::throttle::Throttle;
use crate::{NONSENSE, POD_V4, POD_V6, http};
use anyhow::{Context, Result, bail, ensure};
use socket2::Socket;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time a container may take to become ready; generous, because it is only reached on a failure.
const READY: Duration = Duration::from_secs(60);

/// What a Pod is to be made of.
#[derive(Clone, Debug)]
pub struct Builder {
    sidecar: Spec,
    sidecar_argv: Vec<String>,
    application: Spec,
    application_argv: Option<Vec<String>>,
    /// What comes before the application's own argv.
    application_wrap: Vec<String>,
}

impl Builder {
    /// The argv of the sidecar's PID 1; `pilot-agent` and `envoy` are there.
    #[must_use]
    pub fn sidecar(mut self, argv: &[&str]) -> Self {
        self.sidecar_argv = argv.iter().map(ToString::to_string).collect();
        self
    }

    /// Makes a host's program known to the sidecar as `name`.
    #[must_use]
    pub fn program(mut self, file: impl Into<PathBuf>, name: &str) -> Self {
        self.sidecar.programs.push((file.into(), name.to_owned()));
        self
    }

    /// A variable in the sidecar's environment, and so in its hook's.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.sidecar.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The flags of the `application` program; without this the Pod has only a sidecar.
    #[must_use]
    pub fn application(mut self, flags: &[&str]) -> Self {
        let argv = std::iter::once("application").chain(flags.iter().copied());
        self.application_argv = Some(argv.map(str::to_owned).collect());
        self
    }

    /// Makes a host's program known to the application's container as `name`, and starts the application through
    /// `argv`, such as `outlast app --`.
    #[must_use]
    pub fn wrap_application(mut self, file: impl Into<PathBuf>, name: &str, argv: &[&str]) -> Self {
        self.application.programs.push((file.into(), name.to_owned()));
        self.application_wrap = argv.iter().map(ToString::to_string).collect();
        self
    }

    /// Makes the Pod and waits until both containers are ready.
    pub fn start(&self) -> Result<Pod> {
        let pod = self.start_unready()?;
        pod.await_ready()?;
        Ok(pod)
    }

    /// Makes the Pod; PID 1 of each container has been executed, and no more is known.
    pub fn start_unready(&self) -> Result<Pod> {
        let envoy = requirements()?;
        let log = Log::new();
        let (net, client) = (Netns::new()?, Netns::new()?);
        netns::join(&net, &client)?;
        netns::redirect(&net)?;
        let mut sidecar_spec = self.sidecar.clone();
        sidecar_spec.programs.push((programs().join("pilot-agent"), "pilot-agent".to_owned()));
        sidecar_spec.programs.push((envoy.to_owned(), "envoy".to_owned()));
        let mut application_spec = self.application.clone();
        application_spec.programs.push((programs().join("application"), "application".to_owned()));
        // As in a cluster: all containers start together.
        let run = |argv: &Vec<String>| {
            application_spec.run(&net, &[&self.application_wrap[..], argv].concat(), &log)
        };
        let application = self.application_argv.as_ref().map(run).transpose()?;
        let sidecar = sidecar_spec.run(&net, &self.sidecar_argv, &log)?;
        Ok(Pod {
            sidecar,
            application,
            spec: sidecar_spec,
            net,
            client,
            log,
            gone: Arc::default(),
            upstreams: Mutex::default(),
        })
    }
}

/// The two ends of the veth. A request from the Pod's comes from no container, but from the Pod's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Pod,
    Client,
}

/// A running Pod. Dropping it kills what still runs; while a test panics it prints its log.
#[derive(Debug)]
pub struct Pod {
    sidecar: Process,
    application: Option<Process>,
    spec: Spec,
    net: Netns,
    pub(crate) client: Netns,
    log: Arc<Log>,
    pub(crate) gone: Arc<AtomicBool>,
    pub(crate) upstreams: Mutex<Vec<TcpListener>>,
}

impl Pod {
    /// A sidecar with uid 1337 and a read-only root that runs `pilot-agent proxy sidecar`, and no application.
    pub fn builder() -> Builder {
        let sidecar = Spec { name: "sidecar", uid: 1337, read_only: true, ..Spec::default() };
        let application = Spec { name: "application", uid: 1000, ..Spec::default() };
        let builder = Builder {
            sidecar,
            sidecar_argv: Vec::new(),
            application,
            application_argv: None,
            application_wrap: Vec::new(),
        };
        builder.sidecar(&["pilot-agent", "proxy", "sidecar"])
    }

    pub fn sidecar(&self) -> &Process {
        &self.sidecar
    }

    pub fn application(&self) -> Option<&Process> {
        self.application.as_ref()
    }

    /// What the containers and the hook wrote.
    pub fn log(&self) -> &Log {
        &self.log
    }

    pub(crate) fn log_handle(&self) -> Arc<Log> {
        Arc::clone(&self.log)
    }

    /// Executes a command in the sidecar, under its restrictions; its output is in the log as `source`.
    pub fn exec(&self, argv: &[&str], source: &str) -> Result<Process> {
        let argv: Vec<_> = argv.iter().map(ToString::to_string).collect();
        self.spec.exec(&self.sidecar, &argv, &self.log, source)
    }

    pub(crate) fn start_hook(&self, argv: &[String], source: &str) -> Result<Process> {
        let hook = self.spec.exec(&self.sidecar, argv, &self.log, source);
        hook.inspect_err(|error| self.log.push("kubelet", format!("hook: {error:#}")))
    }

    /// Waits until Envoy answers as ready and the application says that it listens or works.
    pub fn await_ready(&self) -> Result<()> {
        let deadline = Instant::now() + READY;
        // By both families: a new IPv6 address answers later, on a busy machine by seconds.
        let addresses = [format!("{POD_V4}:15021").parse()?, format!("[{POD_V6}]:15021").parse()?];
        let health = |address: &SocketAddr| {
            http::call("GET", *address, "/healthz/ready", Duration::from_secs(1)).is_ok_and(|s| s == 200)
        };
        while !self.client.run(|| addresses.iter().all(health)) {
            if let Some(exit) = self.sidecar.exit() {
                bail!("the sidecar has ended with {:?}:\n{}", exit.status, self.log.text());
            }
            ensure!(
                Instant::now() < deadline,
                "the sidecar is not ready after {READY:?}:\n{}",
                self.log.text()
            );
            thread::sleep(Duration::from_millis(20));
        }
        if self.application.is_some() {
            // Nothing more on that line: a wrapper may say that the proxy is ready.
            let says_ready = |line: &Line| line.source == "application" && line.text == "ready";
            let ready = self.log.wait_for_line(says_ready, READY);
            ensure!(ready.is_some(), "the application is not ready after {READY:?}:\n{}", self.log.text());
        }
        Ok(())
    }

    /// Makes one request from an end of the veth; the status of the answer.
    pub fn call(&self, from: End, method: &str, addr: &str, path: &str) -> Result<u16> {
        let (addr, netns) = (addr.parse()?, if from == End::Pod { &self.net } else { &self.client });
        Ok(netns.run(|| http::call(method, addr, path, Duration::from_secs(10)))?)
    }

    /// A client's connections from `port` fall silent, both ways and without a FIN.
    pub fn silence(&self, port: u16) -> Result<()> {
        netns::silence(&self.client, port)
    }

    /// From now on nobody in the Pod gets an answer from one of its own loopback ports: a server that hangs, or with
    /// `refuse` one that is gone.
    pub fn wall_off(&self, port: u16, refuse: bool) -> Result<()> {
        netns::wall_off(&self.net, port, refuse)
    }

    /// From now on who asks `port` on the Pod's loopback is answered with nonsense, by a sidecar with `POD_NONSENSE=true`.
    pub fn confuse(&self, port: u16) -> Result<()> {
        netns::redirect_port(&self.net, port, NONSENSE)
    }

    /// Drops the first `count` connection attempts to an upstream's `port`: its SYN-ACK comes with the kernel's next
    /// try, 1 s after the one before on Linux 6.5 and later, 1 s and 2 s before that.
    pub fn drop_syns(&self, port: u16, count: u32) -> Result<()> {
        netns::drop_syns(&self.client, port, count)
    }

    /// The sidecar's Envoys get `percent` of a CPU, together, until the value is dropped.
    pub fn throttle_envoy(&self, percent: u32) -> Result<Throttle> {
        self.throttle("envoy", percent)
    }

    /// The same for all of the Pod's processes of this name.
    pub fn throttle(&self, comm: &str, percent: u32) -> Result<Throttle> {
        Throttle::start(&self.called(comm), percent)
    }

    /// The host's process ids of those in the Pod's containers that are called `comm`.
    pub fn called(&self, comm: &str) -> Vec<i32> {
        let containers = std::iter::once(&self.sidecar).chain(&self.application);
        containers.flat_map(|container| container.others(comm)).collect()
    }

    /// The Pod's processes of this name can open only `more` files than they have open now.
    pub fn limit_files(&self, comm: &str, more: u64) -> Result<()> {
        for pid in self.called(comm) {
            let process = format!("/proc/{pid}");
            let open = std::fs::read_dir(format!("{process}/fd"))?.count() as u64;
            let (uid, gid) = (std::fs::metadata(&process)?.uid(), std::fs::metadata(&process)?.gid());
            // As the process's own user: another's takes CAP_SYS_RESOURCE, which root may lack.
            let mut prlimit = Command::new("prlimit");
            prlimit.arg(format!("--pid={pid}")).arg(format!("--nofile={}:", open + more)).uid(uid).gid(gid);
            let status = prlimit.status().context("prlimit, of util-linux")?;
            ensure!(status.success(), "prlimit for {comm}: {status}");
        }
        Ok(())
    }

    pub(crate) fn part(&self) {
        if let Err(error) = netns::part(&self.net) {
            self.log.push("kubelet", format!("{error:#}"));
        }
        self.gone.store(true, Ordering::Relaxed);
        self.log.push("kubelet", "the Pod's network is gone".to_owned());
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
        for listener in self.upstreams.get_mut().unwrap().drain(..) {
            let _ = Socket::from(listener).shutdown(Shutdown::Both);
        }
        if thread::panicking() {
            // The test harness shows stderr of a failed test only through the print macros.
            eprintln!("--- log of the Pod\n{}---", self.log.text());
        }
    }
}

/// What the fixture cannot do without. Returns Envoy's path.
fn requirements() -> Result<&'static Path> {
    static ENVOY: OnceLock<PathBuf> = OnceLock::new();
    ensure!(nix::unistd::geteuid().is_root(), "the Pod fixture makes namespaces: run scripts/test as root");
    programs();
    let envoy = ENVOY.get_or_init(|| repository().join("target/tools/envoy"));
    let envoy = envoy.as_path();
    ensure!(envoy.exists(), "Envoy is not at {}: scripts/test installs what is needed", envoy.display());
    envoy.canonicalize().context("Envoy")?;
    Ok(envoy)
}
