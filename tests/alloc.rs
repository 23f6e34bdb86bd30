//! In the steady state a look allocates nothing, however long a hold lasts: counted by the allocator.
//!
//! Needs root, because it wants a network of its own: a socket that another test opens would be new.

use std::alloc::{GlobalAlloc, Layout, System as Memory};
use std::cell::Cell;
use std::env;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use outlast::hold::{Proxy, Sight};
use outlast::pod::kernel::{Source, System};
use outlast::pod::owners::{Kinds, Rules};
use outlast::pod::snapshot::Observer;

/// Counts what each thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends allocates after its counter is gone.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract.
        unsafe { Memory.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract.
        unsafe { Memory.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract.
        unsafe { Memory.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { Memory.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The tests see each other's processes.
fn proxy_name() -> String {
    format!("proxy-{}", std::process::id())
}

/// A process of the name of the proxy's that lives as long as this.
struct Sleeper(std::process::Child);

impl Sleeper {
    fn start() -> (Sleeper, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(proxy_name());
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        (Sleeper(Command::new(program).arg("1000").spawn().unwrap()), directory)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The application is a process too: what this one holds is outlast's own. Its sockets are handed to a child.
fn hold_in_a_child(sockets: &[std::os::fd::RawFd]) -> Sleeper {
    use std::os::unix::process::CommandExt;
    let sockets = sockets.to_vec();
    let mut command = Command::new("sleep");
    command.arg("1000");
    // SAFETY: system calls on plain numbers.
    unsafe {
        command.pre_exec(move || {
            for socket in &sockets {
                nix::libc::fcntl(*socket, nix::libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
    Sleeper(command.spawn().unwrap())
}

/// 1,000 looks, once what there is has been learnt, at a listener and connections of another process.
fn allocations(source: Source, listens: bool, connections: usize) -> usize {
    use std::os::fd::AsRawFd;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let pairs: Vec<_> = (0..connections / 2)
        .map(|_| (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0))
        .collect();
    let mut fds: Vec<_> =
        pairs.iter().flat_map(|(one, other)| [one.as_raw_fd(), other.as_raw_fd()]).collect();
    if listens {
        fds.push(listener.as_raw_fd());
    }
    let _application = hold_in_a_child(&fds);
    drop((pairs, listener));
    let (_proxy, _directory) = Sleeper::start();
    let rules = Rules {
        hold: Kinds { listeners: true, connections: true, undelivered: true },
        proxy: vec![proxy_name()],
        ignore_ports: Vec::new(),
        ignore_uids: Vec::new(),
    };
    let system = System::open(source);
    assert_eq!(system.source(), if source == Source::Diag { "diag" } else { "proc" });
    let mut observer = Observer::new(system, rules, None);
    // As fast as looks come at most: so all is looked at several times.
    let mut now = Duration::ZERO;
    let mut look = |observer: &mut Observer<System>| {
        now += Duration::from_millis(10);
        let view = observer.look(now);
        assert_eq!((view.sight(), view.proxy()), (Sight::Held, Proxy::Alive), "{:?}", view.trouble);
        let _ = observer.glance();
    };
    (0..500).for_each(|_| look(&mut observer));
    assert_eq!(observer.view().complete, !listens);
    assert_eq!(observer.view().sockets.len(), if listens { 1 } else { connections });
    let before = ALLOCATIONS.get();
    (0..1_000).for_each(|_| look(&mut observer));
    ALLOCATIONS.get() - before
}

/// Runs the test in a process with a network of its own, for /proc/net is that of a process's first thread. True there.
fn in_own_network(test: &str) -> bool {
    if env::var_os("OWN_NETWORK").is_some() {
        return true;
    }
    assert!(nix::unistd::geteuid().is_root(), "a network of one's own wants root: see scripts/test");
    let own = env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
    command.arg(own).args(["--exact", test, "--nocapture"]).env("OWN_NETWORK", "1");
    // Its own account of one test is no part of this one's.
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

fn more_files() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most.max(4_096), most.max(4_096)).unwrap();
}

#[test]
fn a_look_beside_a_listener_and_a_thousand_connections_allocates_nothing() {
    if !in_own_network("a_look_beside_a_listener_and_a_thousand_connections_allocates_nothing") {
        return;
    }
    more_files();
    for source in [Source::Diag, Source::Proc] {
        assert_eq!(allocations(source, true, 1_000), 0, "{source:?}");
    }
}

#[test]
fn a_look_at_the_last_few_connections_allocates_nothing() {
    if !in_own_network("a_look_at_the_last_few_connections_allocates_nothing") {
        return;
    }
    more_files();
    for source in [Source::Diag, Source::Proc] {
        for connections in [6, 40] {
            assert_eq!(allocations(source, false, connections), 0, "{source:?} {connections}");
        }
    }
}

#[test]
fn what_is_allocated_is_counted() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![1_u8]));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}
