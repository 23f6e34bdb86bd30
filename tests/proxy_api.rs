//! What outlast asks of a proxy, and what it makes of any answer: poststart and app against servers that behave, fail,
//! hang or attack. No mesh: the servers are threads of the test.
//!
//! Needs root, util-linux and iproute2: `scripts/test` has them.

use pod::{Space, await_that, outlast};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{Backlog, listen, setsockopt, sockopt};
use nix::unistd::Pid;

/// Only a failure takes so long.
const LONG: Duration = Duration::from_secs(60);
/// A command whose own bound is seconds, on a machine that is busy with other things.
const BOUNDED: Duration = Duration::from_secs(25);

/// One request that a server got.
struct Call {
    /// Counts the server's requests from 0.
    number: usize,
    stream: TcpStream,
}

impl Call {
    fn say(mut self, bytes: &str) {
        let _ = self.stream.write_all(bytes.as_bytes());
    }

    fn status(self, status: &str) {
        self.say(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"));
    }

    /// Says `first`, then `more` without an end, until the other side has had enough.
    fn say_for_ever(mut self, first: &'static str, more: String) {
        thread::spawn(move || {
            let mut said = self.stream.write_all(first.as_bytes());
            while said.is_ok() {
                said = self.stream.write_all(more.as_bytes());
            }
        });
    }
}

/// A server of this test.
struct Server {
    address: SocketAddr,
    /// Method and path of each request.
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Answers each request by `answer`, until that says false: then nobody listens any more.
    fn start(listener: TcpListener, mut answer: impl FnMut(Call) -> bool + Send + 'static) -> Server {
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let mut head = BufReader::new(stream.try_clone().unwrap());
                let mut first = String::new();
                // Whoever only looks whether somebody listens sends nothing.
                if head.read_line(&mut first).unwrap_or(0) == 0 {
                    continue;
                }
                let mut line = String::new();
                while head.read_line(&mut line).unwrap_or(0) > 2 {
                    line.clear();
                }
                let number = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(first.trim_end().trim_end_matches(" HTTP/1.1").to_owned());
                    seen.len() - 1
                };
                if !answer(Call { number, stream }) {
                    break;
                }
            }
        });
        Server { address, requests }
    }

    fn v4(answer: impl FnMut(Call) -> bool + Send + 'static) -> Server {
        Server::start(TcpListener::bind("127.0.0.1:0").unwrap(), answer)
    }

    fn always(status: &'static str) -> Server {
        Server::v4(move |call| {
            call.status(status);
            true
        })
    }

    /// A proxy that obeys: it is gone as soon as it is asked to quit.
    fn obedient() -> Server {
        Server::v4(|call| {
            call.status("200 OK");
            false
        })
    }

    fn silent() -> Server {
        let mut streams = Vec::new();
        Server::v4(move |call| {
            streams.push(call.stream);
            true
        })
    }

    fn url(&self) -> String {
        format!("http://{}/path", self.address)
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }

    fn await_requests(&self, count: usize) {
        await_that("requests", || self.requests.lock().unwrap().len() >= count);
    }
}

/// A port on which nobody listens, for as long as the socket lives.
fn refusing() -> (nix::sys::socket::SockaddrIn, std::os::fd::OwnedFd) {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};
    use std::os::fd::AsRawFd;
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(fd.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    (getsockname(fd.as_raw_fd()).unwrap(), fd)
}

/// outlast, with nothing in its environment but PATH and what the test sets.
struct Outlast(Command);

struct Ended {
    status: i32,
    /// Its own lines, on stderr.
    log: String,
    stdout: String,
    after: Duration,
}

impl Outlast {
    /// `poststart` or `app`.
    fn new(words: &[&str]) -> Outlast {
        Outlast::as_argument_of(Command::new(outlast()), words)
    }

    fn as_argument_of(mut command: Command, words: &[&str]) -> Outlast {
        command.args(words).env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Outlast(command)
    }

    /// As PID 1 of a namespace of its own.
    fn as_init(words: &[&str]) -> Outlast {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(outlast());
        Outlast::as_argument_of(command, words)
    }

    fn set(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Outlast {
        self.0.env(name, value);
        self
    }

    fn start(mut self) -> Child {
        self.0.spawn().unwrap()
    }

    fn run(self) -> Ended {
        finish(self.start())
    }
}

/// Waits within bounds, so that what hangs fails.
fn finish(mut child: Child) -> Ended {
    let began = Instant::now();
    let deadline = began + LONG;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let output = child.wait_with_output().unwrap();
            panic!("it hangs: {}", String::from_utf8_lossy(&output.stderr));
        }
        thread::sleep(Duration::from_millis(2));
    }
    let after = began.elapsed();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (log, stdout) = (text(output.stderr), text(output.stdout));
    let status = output.status.code().unwrap_or_else(|| panic!("{}: {log}", output.status));
    assert!(!log.contains("panicked"), "{log}");
    Ended { status, log, stdout, after }
}

fn poststart(url: &str, flags: &[&str]) -> Ended {
    Outlast::new(&[&["poststart", "--ready-url", url], flags].concat()).run()
}

/// `outlast app` behind a proxy that is ready, with flags, variables and a COMMAND.
fn app(ready: &Server, words: &[&str]) -> Outlast {
    Outlast::new(&[&["app"], words].concat()).set("OUTLAST_READY_URL", ready.url())
}

fn only_child(of: u32) -> Option<i32> {
    fs::read_to_string(format!("/proc/{of}/task/{of}/children")).ok()?.trim().parse().ok()
}

fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

// --- poststart ---

#[test]
fn poststart_looks_at_once_and_a_ready_proxy_ends_it() {
    // kubexit#6, #11: already true at the start, and still waited for a change.
    let server = Server::always("200 OK");
    let ended = poststart(&server.url(), &[]);
    assert_eq!(ended.status, 0, "{}", ended.log);
    assert_eq!(server.requests(), ["GET /path"]);
    assert!(ended.log.contains("the proxy is ready"), "{}", ended.log);
}

#[test]
fn poststart_tries_again_until_the_answer_is_200() {
    let server = Server::v4(|call| {
        let status = if call.number < 3 { "503 Service Unavailable" } else { "200 OK" };
        call.status(status);
        true
    });
    let ended = poststart(&server.url(), &[]);
    assert_eq!(ended.status, 0, "{}", ended.log);
    assert_eq!(server.requests().len(), 4);
    assert!(ended.after >= Duration::from_millis(700), "three pauses of 250 ms: {:?}", ended.after);
}

#[test]
fn poststart_waits_for_a_server_that_comes_later() {
    let (address, fd) = refusing();
    let url = format!("http://{address}/path");
    let child = Outlast::new(&["poststart", "--ready-url", &url]).start();
    // Nothing shows a refused connection; what matters is that it does not end.
    thread::sleep(Duration::from_millis(300));
    // On the same socket: another test could take the port.
    listen(&fd, Backlog::new(16).unwrap()).unwrap();
    let server = Server::start(TcpListener::from(fd), |call| {
        call.status("200 OK");
        true
    });
    assert_eq!(finish(child).status, 0);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn poststart_that_times_out_returns_124_and_says_the_last_error() {
    // scuttle#38: reaching the timeout panics.
    let server = Server::always("503 Service Unavailable");
    let (refusing, _fd) = refusing();
    let silent = Server::silent();
    for (url, error) in [
        (server.url(), "status 503"),
        (format!("http://{refusing}/"), "refused"),
        (silent.url(), "no answer within 500ms"),
    ] {
        let ended = poststart(&url, &["--ready-timeout=600ms"]);
        assert_eq!(ended.status, 124, "{}", ended.log);
        let last = ended.log.lines().last().unwrap();
        assert!(last.contains(error) && last.contains(&url), "{last}");
        assert!(ended.after >= Duration::from_millis(600) && ended.after < BOUNDED, "{:?}", ended.after);
    }
    assert!(server.requests().len() >= 2);
}

#[test]
fn poststart_may_continue_after_the_timeout() {
    let server = Server::always("503 Service Unavailable");
    let ended = poststart(&server.url(), &["--ready-timeout=300ms", "--on-timeout=continue"]);
    assert_eq!(ended.status, 0, "{}", ended.log);
    assert!(ended.log.contains("WARN the proxy is not ready: going on all the same"), "{}", ended.log);
    assert!(ended.log.contains("status 503") && !ended.log.contains("ERROR"), "{}", ended.log);
}

#[test]
fn poststart_looks_once_even_without_time() {
    let server = Server::always("200 OK");
    assert_eq!(poststart(&server.url(), &["--ready-timeout=0"]).status, 0);
    let server = Server::always("503 Service Unavailable");
    assert_eq!(poststart(&server.url(), &["--ready-timeout=0"]).status, 124);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_signal_ends_poststart_with_128_and_its_number_as_pid_1_too() {
    // linkerd-await ignores SIGTERM as PID 1; a request that hangs must not hide the signal either.
    for server in [Server::always("503 Service Unavailable"), Server::silent()] {
        let url = server.url();
        let words = ["poststart", "--ready-url", &url];
        for (number, status) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGQUIT, 131)] {
            let before = server.requests().len();
            let child = Outlast::new(&words).start();
            server.await_requests(before + 1);
            signal(child.id().cast_signed(), number);
            let ended = finish(child);
            assert_eq!(ended.status, status, "{}", ended.log);
            assert!(ended.log.contains(&format!("signal={number}")), "{}", ended.log);
            assert!(ended.after < BOUNDED);
        }
        let before = server.requests().len();
        let child = Outlast::as_init(&words).start();
        server.await_requests(before + 1);
        signal(only_child(child.id()).unwrap(), Signal::SIGTERM);
        let ended = finish(child);
        assert_eq!(ended.status, 143, "{}", ended.log);
    }
}

#[test]
fn poststart_refuses_settings_of_the_hold_that_would_only_show_at_the_stop() {
    let server = Server::always("200 OK");
    let ended = Outlast::new(&["poststart", "--ready-url", &server.url()]).set("OUTLAST_TIMEOUT", "30").run();
    assert_eq!((ended.status, server.requests().len()), (2, 0), "{}", ended.log);
    assert!(ended.log.contains("OUTLAST_TIMEOUT"), "{}", ended.log);
}

#[test]
fn scuttle_45f2a25_a_malformed_url_is_named_and_nothing_starts() {
    let directory = tempfile::tempdir().unwrap();
    let started = directory.path().join("started");
    for url in
        ["", "15021", "http://", "http://example.com/", "https://127.0.0.1/", "http://127.0.0.1:99999/"]
    {
        let words = ["app", "--ready-url", url, "--", "touch", started.to_str().unwrap()];
        let ended = Outlast::new(&words).run();
        assert_eq!((ended.status, ended.log.lines().count()), (2, 1), "{url}: {}", ended.log);
        assert!(ended.log.contains("--ready-url"), "{}", ended.log);
        let words = ["app", "--quit-url", url, "--", "touch", started.to_str().unwrap()];
        assert_eq!(Outlast::new(&words).run().status, 2, "{url}");
    }
    assert!(!started.exists());
}

// --- every request ---

/// The program's address space: a hundredth of what an endless answer would take, and enough for itself.
const MEMORY: &str = "--as=33554432";

/// Asks a server that means harm, for a second.
fn ask_bounded(answer: impl FnMut(Call) -> bool + Send + 'static) -> (Ended, Vec<String>) {
    let server = Server::v4(answer);
    let mut prlimit = Command::new("prlimit");
    prlimit.arg(MEMORY).arg(outlast());
    let words = ["poststart", "--ready-url", &server.url(), "--ready-timeout=1s"];
    let ended = Outlast::as_argument_of(prlimit, &words).run();
    assert!(ended.after < BOUNDED, "{:?}", ended.after);
    let requests = server.requests();
    assert!(requests.iter().all(|request| request == "GET /path"), "{requests:?}");
    (ended, requests)
}

#[test]
fn a_proxy_in_the_environment_is_never_asked() {
    let hostile = Server::always("200 OK");
    let ready = Server::always("200 OK");
    let (refusing, _fd) = refusing();
    let names = ["http_proxy", "https_proxy", "all_proxy", "no_proxy"];
    let set = |mut outlast: Outlast| {
        for name in names.into_iter().flat_map(|name| [name.to_owned(), name.to_uppercase()]) {
            let proxies = !name.eq_ignore_ascii_case("no_proxy");
            outlast = outlast.set(&name, if proxies { hostile.url() } else { String::new() });
        }
        outlast.run()
    };
    assert_eq!(set(Outlast::new(&["poststart", "--ready-url", &ready.url()])).status, 0);
    let nobody = format!("http://{refusing}/");
    assert_eq!(
        set(Outlast::new(&["poststart", "--ready-url", &nobody, "--ready-timeout=300ms"])).status,
        124
    );
    let quit = Server::obedient();
    assert_eq!(set(app(&ready, &["--quit=always", "--quit-url", &quit.url(), "--", "true"])).status, 0);
    assert_eq!((hostile.requests().len(), ready.requests().len()), (0, 2));
    assert_eq!(quit.requests(), ["POST /path"]);
}

#[test]
fn a_server_on_the_v6_loopback_alone_is_found_by_every_name() {
    let server = Server::start(TcpListener::bind("[::1]:0").unwrap(), |call| {
        call.status("200 OK");
        true
    });
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        let ended = poststart(&format!("http://{host}:{}/path", server.address.port()), &[]);
        assert_eq!(ended.status, 0, "{host}: {}", ended.log);
    }
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn of_both_loopbacks_the_one_that_answered_is_kept() {
    // One port of both, which no other test can take.
    let (port, fd, listener) = loop {
        let (address, fd) = refusing();
        if let Ok(listener) = TcpListener::bind(("::1", address.port())) {
            break (address.port(), fd, listener);
        }
    };
    let v6 = Server::start(listener, |call| {
        call.status("503 Service Unavailable");
        true
    });
    let url = format!("http://127.0.0.1:{port}/path");
    let child = Outlast::new(&["poststart", "--ready-url", &url, "--ready-timeout=2s"]).start();
    v6.await_requests(1);
    // An attacker who comes later to the other address would call the proxy ready.
    listen(&fd, Backlog::new(16).unwrap()).unwrap();
    let v4 = Server::start(TcpListener::from(fd), |call| {
        call.status("200 OK");
        true
    });
    assert_eq!(finish(child).status, 124);
    assert_eq!(v4.requests().len(), 0);
}

/// Dropping it ends the process, in a test that fails too.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_redirect_is_an_answer_and_not_followed() {
    // In a network of its own, where the link-local address of cloud metadata is there and would answer.
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--net", "--fork", "--kill-child", "sh", "-c"]);
        command.arg("ip link set lo up && ip addr add 169.254.169.254/32 dev lo && exec \"$@\"");
        command.arg("sh").args(words).stdout(Stdio::piped());
        Ending(command.spawn().unwrap())
    };
    let mut holder = unshare(&["sh", "-c", "echo up; exec sleep 1000"]);
    let mut up = String::new();
    BufReader::new(holder.0.stdout.take().unwrap()).read_line(&mut up).unwrap();
    let network = || File::open(format!("/proc/{}/ns/net", holder.0.id())).unwrap();
    let inside = |address: (Ipv4Addr, u16), status: &'static str| {
        thread::scope(|scope| {
            let bind = || {
                setns(network(), CloneFlags::CLONE_NEWNET).unwrap();
                TcpListener::bind(address).unwrap()
            };
            let listener = scope.spawn(bind).join().unwrap();
            Server::start(listener, move |call| {
                call.say(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"));
                true
            })
        })
    };
    let metadata = inside((Ipv4Addr::new(169, 254, 169, 254), 80), "200 OK");
    for status in ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"] {
        let location = match status {
            "301 Moved" => "301 Moved\r\nlocation: http://169.254.169.254/",
            "302 Found" => "302 Found\r\nlocation: http://169.254.169.254/latest/meta-data",
            "307 Temporary" => "307 Temporary\r\nlocation: http://169.254.169.254/",
            _ => "308 Permanent\r\nlocation: /elsewhere",
        };
        let server = inside((Ipv4Addr::LOCALHOST, 0), location);
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--net", "--target", &holder.0.id().to_string(), "--"]).arg(outlast());
        let words = ["poststart", "--ready-url", &server.url(), "--ready-timeout=300ms"];
        let ended = Outlast::as_argument_of(nsenter, &words).run();
        assert_eq!(ended.status, 124, "{}", ended.log);
        assert!(ended.log.contains(&format!("status {}", &status[..3])), "{}", ended.log);
        assert!(server.requests().iter().all(|request| request == "GET /path"), "{:?}", server.requests());
    }
    assert_eq!(metadata.requests().len(), 0);
}

#[test]
fn scuttle_27_a_port_that_accepts_and_says_nothing_is_bounded() {
    let mut streams = Vec::new();
    let (ended, requests) = ask_bounded(move |call| {
        streams.push(call.stream);
        true
    });
    assert_eq!(ended.status, 124, "{}", ended.log);
    // 500 ms each: with a longer limit there would be one.
    assert!(requests.len() >= 2, "{requests:?}");
}

#[test]
fn a_port_that_resets_is_asked_again() {
    let (ended, requests) = ask_bounded(|call| {
        if call.number < 2 {
            let now = libc::linger { l_onoff: 1, l_linger: 0 };
            setsockopt(&call.stream, sockopt::Linger, &now).unwrap();
        } else {
            call.status("200 OK");
        }
        true
    });
    assert_eq!((ended.status, requests.len()), (0, 3), "{}", ended.log);
}

#[test]
fn a_port_that_closes_without_a_word_is_asked_again() {
    let (ended, requests) = ask_bounded(|call| {
        if call.number == 1 {
            call.status("200 OK");
        }
        true
    });
    assert_eq!((ended.status, requests.len()), (0, 2), "{}", ended.log);
}

#[test]
fn an_endless_body_is_not_read() {
    for head in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n"] {
        let (ended, _) = ask_bounded(move |call| {
            call.say_for_ever(head, "x".repeat(65_536));
            true
        });
        assert_eq!(ended.status, 0, "{}", ended.log);
    }
    let (ended, _) = ask_bounded(|call| {
        call.say_for_ever("HTTP/1.1 503 No\r\n\r\n", "x".repeat(65_536));
        true
    });
    assert_eq!(ended.status, 124, "{}", ended.log);
}

#[test]
fn a_chunked_body_is_as_good_as_another() {
    let (ended, _) = ask_bounded(|call| {
        call.say("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nLIVE\r\n0\r\n\r\n");
        true
    });
    assert_eq!(ended.status, 0, "{}", ended.log);
    let (ended, _) = ask_bounded(|call| {
        call.say_for_ever(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
            "x".repeat(65_536),
        );
        true
    });
    assert_eq!(ended.status, 0, "{}", ended.log);
}

#[test]
fn endless_headers_are_no_answer() {
    let many = "name: value\r\n".repeat(1_000);
    let long = "x".repeat(65_536);
    for (first, more) in [
        ("HTTP/1.1 200 OK\r\n", many),
        ("HTTP/1.1 200 OK\r\nname: ", long.clone()),
        ("HTTP/1.1 200 ", long.clone()),
        ("", long),
    ] {
        let (ended, _) = ask_bounded(move |call| {
            call.say_for_ever(first, more.clone());
            true
        });
        assert_eq!(ended.status, 124, "{}", ended.log);
        assert!(ended.log.len() < 4096, "{} bytes", ended.log.len());
    }
}

#[test]
fn an_answer_in_drips_is_bounded_as_a_whole() {
    let (ended, requests) = ask_bounded(|mut call| {
        thread::spawn(move || {
            for byte in "HTTP/1.1 200 OK\r\nname: value\r\n\r\n".bytes() {
                if call.stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(100));
            }
        });
        true
    });
    assert_eq!(ended.status, 124, "{}", ended.log);
    assert!(requests.len() >= 2, "{requests:?}");
}

#[test]
fn endless_interim_answers_are_no_answer() {
    for interim in ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\n\r\n"] {
        let (ended, _) = ask_bounded(|call| {
            call.say_for_ever("", interim.repeat(100));
            true
        });
        assert_eq!(ended.status, 124, "{}", ended.log);
    }
}

#[test]
fn garbage_is_no_answer() {
    for garbage in [
        "200\r\n\r\n",
        "\0\0\0\0\r\n\r\n",
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/9.9 200 OK\r\n\r\n",
        "HTTP/1.1 20x OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "\u{15}\u{3}\u{1}\0\u{2}\u{2}\u{50}",
        "\r\n\r\n",
    ] {
        let (ended, _) = ask_bounded(move |call| {
            call.say(garbage);
            true
        });
        assert_eq!(ended.status, 124, "{garbage:?}: {}", ended.log);
        // One line, whatever was said.
        assert!(ended.log.lines().all(|line| line.starts_with("20")), "{garbage:?}: {}", ended.log);
    }
}

// --- app ---

#[test]
fn app_starts_command_once_and_only_when_the_proxy_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let starts = directory.path().join("starts");
    let file = starts.clone();
    let too_early = Arc::new(Mutex::new(false));
    let early = Arc::clone(&too_early);
    let ready = Server::v4(move |call| {
        *early.lock().unwrap() |= file.exists();
        let status = if call.number < 2 { "503 Service Unavailable" } else { "200 OK" };
        call.status(status);
        true
    });
    let ended =
        app(&ready, &["--", "sh", "-c", "echo start >>\"$0\"; exit 7", starts.to_str().unwrap()]).run();
    assert_eq!(ended.status, 7, "{}", ended.log);
    assert_eq!(fs::read_to_string(starts).unwrap(), "start\n");
    assert_eq!((ready.requests().len(), *too_early.lock().unwrap()), (3, false));
}

#[test]
fn app_does_not_start_command_after_the_timeout_unless_told_to_continue() {
    let ready = Server::always("503 Service Unavailable");
    let ended = app(&ready, &["--ready-timeout=300ms", "--", "echo", "started"]).run();
    assert_eq!((ended.status, ended.stdout.as_str()), (124, ""), "{}", ended.log);
    let ended =
        app(&ready, &["--ready-timeout=300ms", "--on-timeout=continue", "--", "echo", "started"]).run();
    assert_eq!((ended.status, ended.stdout.as_str()), (0, "started\n"), "{}", ended.log);
}

#[test]
fn scuttle_13_quit_follows_the_status_so_that_retries_keep_their_proxy() {
    let ready = Server::always("200 OK");
    for (quit, command, status, asked) in [
        ("never", "exit 0", 0, 0),
        ("never", "exit 7", 7, 0),
        ("always", "exit 0", 0, 1),
        ("always", "exit 7", 7, 1),
        ("always", "kill -KILL $$", 137, 1),
        ("on-success", "exit 0", 0, 1),
        ("on-success", "exit 7", 7, 0),
        ("on-success", "kill -TERM $$", 143, 0),
    ] {
        let proxy = Server::obedient();
        let flags = ["--quit", quit, "--quit-url", &proxy.url(), "--", "sh", "-c", command];
        let ended = app(&ready, &flags).run();
        assert_eq!(ended.status, status, "--quit={quit} {command}: {}", ended.log);
        assert_eq!(proxy.requests(), vec!["POST /path"; asked], "--quit={quit} {command}");
        assert_eq!(ended.log.contains("the proxy is gone"), asked == 1, "{}", ended.log);
    }
}

#[test]
fn linkerd_await_362_a_command_that_cannot_start_still_quits_the_proxy() {
    // scuttle panics where the binary is missing.
    let ready = Server::always("200 OK");
    for (command, status) in
        [("/nowhere/command", 127), ("no-such-command", 127), ("/etc/passwd", 126), ("/", 126)]
    {
        for (quit, asked) in [("always", 1), ("on-success", 0), ("never", 0)] {
            let proxy = Server::obedient();
            let ended = app(&ready, &["--quit", quit, "--quit-url", &proxy.url(), "--", command]).run();
            assert_eq!(ended.status, status, "{}", ended.log);
            assert!(ended.log.contains(command), "{}", ended.log);
            assert_eq!(proxy.requests().len(), asked, "--quit={quit} {command}");
        }
    }
}

#[test]
fn a_proxy_that_is_never_ready_is_asked_to_quit_as_well() {
    let ready = Server::always("503 Service Unavailable");
    let proxy = Server::obedient();
    let flags =
        ["--ready-timeout=300ms", "--quit=always", "--quit-url", &proxy.url(), "--", "echo", "started"];
    let ended = app(&ready, &flags).run();
    assert_eq!((ended.status, ended.stdout.as_str()), (124, ""), "{}", ended.log);
    assert_eq!(proxy.requests().len(), 1);
}

#[test]
fn a_quit_call_that_hangs_fails_or_is_refused_is_bounded_and_keeps_the_status() {
    // kvij 2023-10: the quit call hangs and the Job with it.
    let ready = Server::always("200 OK");
    let (refusing, _fd) = refusing();
    let (hanging, failing) = (Server::silent(), Server::always("500 Internal Server Error"));
    let refusing = format!("http://{refusing}/");
    thread::scope(|scope| {
        for (url, why) in
            [(hanging.url(), "no answer within"), (failing.url(), "status 500"), (refusing, "refused")]
        {
            let ready = &ready;
            scope.spawn(move || {
                let flags = ["--quit=always", "--quit-url", &url, "--", "sh", "-c", "exit 7"];
                let ended = app(ready, &flags).run();
                assert_eq!(ended.status, 7, "{}", ended.log);
                assert!(ended.after < BOUNDED, "{why}: {:?}", ended.after);
                assert!(
                    ended.log.contains("cannot ask the proxy to quit") && ended.log.contains(why),
                    "{}",
                    ended.log
                );
            });
        }
    });
    assert!(hanging.requests().len() >= 2 && failing.requests().len() >= 2, "tried again");
}

#[test]
fn a_refusal_by_word_is_not_repeated() {
    let ready = Server::always("200 OK");
    for status in ["403 Forbidden", "404 Not Found", "405 Method Not Allowed"] {
        let proxy = Server::always(status);
        let ended =
            app(&ready, &["--quit=always", "--quit-url", &proxy.url(), "--", "sh", "-c", "exit 7"]).run();
        assert_eq!((ended.status, proxy.requests().len()), (7, 1), "{}", ended.log);
        assert!(ended.log.contains(&format!("status {}", &status[..3])), "{}", ended.log);
    }
}

#[test]
fn a_proxy_that_fails_at_first_is_asked_again() {
    let ready = Server::always("200 OK");
    let proxy = Server::v4(|call| {
        let obeys = call.number == 2;
        call.status(if obeys { "200 OK" } else { "503 Service Unavailable" });
        !obeys
    });
    let ended = app(&ready, &["--quit=always", "--quit-url", &proxy.url(), "--", "true"]).run();
    assert_eq!((ended.status, proxy.requests().len()), (0, 3), "{}", ended.log);
    assert!(ended.log.contains("the proxy is gone"), "{}", ended.log);
}

#[test]
fn a_proxy_that_says_yes_and_stays_is_named_within_bounds() {
    let ready = Server::always("200 OK");
    let proxy = Server::always("200 OK");
    let ended = app(&ready, &["--quit=always", "--quit-url", &proxy.url(), "--", "sh", "-c", "exit 7"]).run();
    assert_eq!((ended.status, proxy.requests().len()), (7, 1), "{}", ended.log);
    assert!(ended.log.contains("still there") && ended.after < BOUNDED, "{:?} {}", ended.after, ended.log);
}

#[test]
fn every_quit_url_is_asked_whatever_the_others_answer() {
    let ready = Server::always("200 OK");
    let refuses = Server::v4(|call| {
        call.status("404 Not Found");
        false
    });
    let (one, two) = (Server::obedient(), Server::obedient());
    let urls = [one.url(), refuses.url(), two.url()].join(",");
    let ended = app(&ready, &["--quit=always", "--quit-url", &urls, "--", "true"]).run();
    assert_eq!(ended.status, 0, "{}", ended.log);
    for server in [one, refuses, two] {
        assert_eq!(server.requests(), ["POST /path"], "{}", ended.log);
    }
}

#[test]
fn a_proxy_that_is_gone_before_it_has_answered_has_quit() {
    let ready = Server::always("200 OK");
    let proxy = Server::v4(|_| false);
    let ended = app(&ready, &["--quit=always", "--quit-url", &proxy.url(), "--", "sh", "-c", "exit 7"]).run();
    assert_eq!((ended.status, proxy.requests().len()), (7, 1), "{}", ended.log);
    assert!(ended.log.contains("the proxy is gone") && !ended.log.contains("cannot ask"), "{}", ended.log);
}

#[test]
fn without_ipv6_a_refusal_is_a_refusal() {
    let mut unshare = Command::new("unshare");
    let setup = "ip link set lo up && echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 && exec \"$@\"";
    unshare.args(["--net", "--fork", "--kill-child", "sh", "-c", setup, "sh"]).arg(outlast());
    let words = ["poststart", "--ready-url=http://127.0.0.1:1/", "--ready-timeout=0"];
    let ended = Outlast::as_argument_of(unshare, &words).run();
    assert_eq!(ended.status, 124, "{}", ended.log);
    assert!(ended.log.contains("refused"), "{}", ended.log);
}

#[test]
fn ports_that_are_all_taken_are_no_reason_to_ask_another_loopback() {
    // Whoever takes them could answer there in the proxy's place.
    let space =
        Space::start_with("echo 40000 40001 >/proc/sys/net/ipv4/ip_local_port_range", &["sleep", "1000"]);
    let server = space.inside(|| {
        Server::start(TcpListener::bind("[::1]:15021").unwrap(), |call| {
            call.status("200 OK");
            true
        })
    });
    let _taken = space.inside(|| {
        let proxys = TcpListener::bind("127.0.0.1:15021").unwrap();
        let connect = || TcpStream::connect("127.0.0.1:15021");
        let taken = [connect().unwrap(), connect().unwrap()];
        assert_eq!(connect().unwrap_err().raw_os_error(), Some(libc::EADDRNOTAVAIL));
        (proxys, taken)
    });
    let outlast = outlast();
    let poststart = [outlast.to_str().unwrap(), "poststart", "--ready-timeout=300ms"];
    let output = space.command(&poststart).output().unwrap();
    assert_eq!(output.status.code(), Some(124), "{output:?}");
    assert_eq!(server.requests(), Vec::<String>::new());
}

#[test]
fn quit_urls_may_be_on_different_loopbacks() {
    let ready = Server::always("200 OK");
    let obedient = |listener| {
        Server::start(listener, |call| {
            call.status("200 OK");
            false
        })
    };
    let v6 = || obedient(TcpListener::bind("[::1]:0").unwrap());
    let v4 = || obedient(TcpListener::bind("127.0.0.1:0").unwrap());
    for servers in [[v4(), v6()], [v6(), v4()]] {
        let urls =
            servers.each_ref().map(|server| format!("http://localhost:{}/path", server.address.port()));
        let ended = app(&ready, &["--quit=always", "--quit-url", &urls.join(","), "--", "true"]).run();
        assert_eq!(ended.status, 0, "{}", ended.log);
        assert!(ended.log.contains("the proxy is gone"), "{}", ended.log);
        assert!(servers.iter().all(|server| server.requests() == ["POST /path"]), "{}", ended.log);
    }
}

#[test]
fn scuttle_34_a_signal_before_command_exists_ends_the_wait_and_quits_the_proxy() {
    // scuttle#44 too; and linkerd-await: as PID 1, SIGTERM is ignored while it waits.
    let ready = Server::always("503 Service Unavailable");
    for (quit, asked) in [("always", 1), ("on-success", 0), ("never", 0)] {
        for init in [false, true] {
            let proxy = Server::obedient();
            let words = ["app", "--quit", quit, "--quit-url", &proxy.url(), "--", "echo", "started"];
            let outlast = if init { Outlast::as_init(&words) } else { Outlast::new(&words) };
            let before = ready.requests().len();
            let child = outlast.set("OUTLAST_READY_URL", ready.url()).start();
            ready.await_requests(before + 1);
            let pid = if init { only_child(child.id()).unwrap() } else { child.id().cast_signed() };
            signal(pid, Signal::SIGTERM);
            let ended = finish(child);
            assert_eq!((ended.status, ended.stdout.as_str()), (143, ""), "{}", ended.log);
            assert_eq!(proxy.requests().len(), asked, "--quit={quit}");
        }
    }
}

#[test]
fn other_signals_of_the_wait_reach_command() {
    let is_ready = Arc::new(Mutex::new(false));
    let now = Arc::clone(&is_ready);
    let ready = Server::v4(move |call| {
        call.status(if *now.lock().unwrap() { "200 OK" } else { "503 Service Unavailable" });
        true
    });
    // The shell inherits what outlast was started with: USR1 has its default, which ends it.
    let child = app(&ready, &["--", "sh", "-c", "exec sleep 60"]).start();
    ready.await_requests(1);
    signal(child.id().cast_signed(), Signal::SIGUSR1);
    *is_ready.lock().unwrap() = true;
    assert_eq!(finish(child).status, 128 + 10);
}

#[test]
fn a_signal_while_command_runs_is_commands() {
    // scuttle answers 255 for a signal.
    let ready = Server::always("200 OK");
    let proxy = Server::obedient();
    let flags = [
        "--quit=always",
        "--quit-url",
        &proxy.url(),
        "--",
        "sh",
        "-c",
        "trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done",
    ];
    let mut child = app(&ready, &flags).start();
    let mut up = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut up).unwrap();
    assert_eq!(proxy.requests().len(), 0);
    signal(child.id().cast_signed(), Signal::SIGTERM);
    let ended = finish(child);
    assert_eq!((ended.status, proxy.requests().len()), (9, 1), "{}", ended.log);
}

#[test]
fn a_signal_ends_the_wait_for_the_proxys_end_and_keeps_the_status() {
    let ready = Server::always("200 OK");
    let proxy = Server::always("200 OK");
    let child =
        app(&ready, &["--quit=always", "--quit-url", &proxy.url(), "--", "sh", "-c", "exit 7"]).start();
    proxy.await_requests(1);
    signal(child.id().cast_signed(), Signal::SIGTERM);
    let ended = finish(child);
    assert_eq!(ended.status, 7, "{}", ended.log);
    assert!(ended.log.contains("a signal ends the wait"), "{}", ended.log);
}

#[test]
fn disabled_it_becomes_command_and_asks_no_one() {
    let server = Server::always("503 Service Unavailable");
    let quit = Server::obedient();
    let words = ["--quit=always", "--quit-url", &quit.url(), "--", "sh", "-c", "echo $$; exit 7"];
    for disable in ["true", "1"] {
        let child = app(&server, &words).set("OUTLAST_DISABLE", disable).start();
        let pid = child.id();
        let ended = finish(child);
        assert_eq!((ended.status, ended.stdout), (7, format!("{pid}\n")), "{}", ended.log);
        assert_eq!(ended.log, "");
    }
    let ended = app(&server, &["--disable", "--", "no-such-command"]).run();
    assert_eq!(ended.status, 127, "{}", ended.log);
    assert_eq!((server.requests().len(), quit.requests().len()), (0, 0));
}

#[test]
fn linkerd_await_false_does_not_disable() {
    let server = Server::always("200 OK");
    for disable in ["false", "0", ""] {
        let ended = app(&server, &["--", "true"]).set("OUTLAST_DISABLE", disable).run();
        assert_eq!(ended.status, 0, "{}", ended.log);
    }
    assert_eq!(server.requests().len(), 3);
    let ended = app(&server, &["--", "true"]).set("OUTLAST_DISABLE", "no").run();
    assert_eq!(ended.status, 2, "{}", ended.log);
}

#[test]
fn scuttle_bad_values_and_strange_names_are_said() {
    let ready = Server::always("200 OK");
    for (name, value) in
        [("OUTLAST_QUIT", "sometimes"), ("OUTLAST_READY_TIMEOUT", "60"), ("OUTLAST_ON_TIMEOUT", "wait")]
    {
        let ended = app(&ready, &["--", "echo", "started"]).set(name, value).run();
        assert_eq!((ended.status, ended.stdout.as_str()), (2, ""), "{}", ended.log);
        assert!(ended.log.contains(name) && ended.log.contains(value), "{}", ended.log);
    }
    // Variables without our prefix are another program's.
    let ended = app(&ready, &["--", "true"])
        .set("ENVOY_ADMIN_API", "http://127.0.0.1:1")
        .set("START_WITHOUT_ENVOY", "false")
        .set("NEVER_KILL_ISTIO", "false")
        .set("OUTLAST_FROBNICATE", "1")
        .run();
    assert_eq!(ended.status, 0, "{}", ended.log);
    assert!(
        ended.log.contains("OUTLAST_FROBNICATE") && !ended.log.contains("ENVOY_ADMIN_API"),
        "{}",
        ended.log
    );
    // However many there are.
    let many = (0..1_000)
        .fold(Outlast::new(&["poststart", "--ready-url", &ready.url()]), |outlast, number| {
            outlast.set(&format!("OUTLAST_X{number}"), "1")
        });
    let ended = many.run();
    assert_eq!((ended.status, ended.log.lines().count()), (0, 2), "{}", ended.log);
    assert!(ended.log.contains("count=1000"), "{}", ended.log);
}

#[test]
fn linkerd_await_567_app_and_poststart_have_help_that_names_the_restart_policies() {
    for command in ["app", "poststart"] {
        let ended = Outlast::new(&[command, "--help"]).run();
        assert_eq!((ended.status, ended.log.as_str()), (0, ""));
        assert!(ended.stdout.contains("--ready-timeout") && ended.stdout.contains("60s"), "{}", ended.stdout);
    }
    let help = Outlast::new(&["app", "--help"]).run().stdout;
    for word in ["restartPolicy Never: always", "OnFailure: on-success", "second application container"] {
        let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{word} in {help}");
    }
}
