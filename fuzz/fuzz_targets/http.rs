//! What a server on loopback may answer: any bytes, and then the end.
#![no_main]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::mpsc::{Sender, channel};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use outlast::proxy_api::{Method, ProxyApi, Url};

struct Server {
    url: Url,
    answers: Mutex<Sender<Vec<u8>>>,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = Url::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap();
    let (answers, next) = channel::<Vec<u8>>();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let Ok(answer) = next.recv() else { return };
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(&answer);
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    Server { url, answers: Mutex::new(answers) }
});

fuzz_target!(|answer: &[u8]| {
    SERVER.answers.lock().unwrap().send(answer.to_vec()).unwrap();
    let start = Instant::now();
    let status = ProxyApi::new().request(Method::Get, &SERVER.url);
    assert!(start.elapsed() < Duration::from_secs(5));
    if let Ok(status) = status {
        assert!((100..1000).contains(&status));
        // Empty lines before it are let pass (RFC 9112, 2.2).
        let start = answer.iter().position(|byte| !b"\r\n".contains(byte));
        assert!(
            start.is_some_and(|start| answer[start..].starts_with(b"HTTP/1.")),
            "a status out of nothing"
        );
    }
});
