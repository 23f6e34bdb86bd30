//! Servers in the client's namespace: what the application calls.

use crate::http;
use crate::pod::Pod;
use anyhow::Result;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{self, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// An HTTP server that remembers its calls.
#[derive(Debug)]
pub struct Upstream(Arc<Mutex<Vec<(Instant, String)>>>);

impl Upstream {
    /// When which path was called.
    pub fn calls(&self) -> Vec<(Instant, String)> {
        self.0.lock().unwrap().clone()
    }
}

/// A TLS server that is slow to say hello.
#[derive(Debug)]
pub struct TlsUpstream(Arc<Mutex<Vec<u8>>>);

impl TlsUpstream {
    /// All that it received, decrypted.
    pub fn received(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Pod {
    /// Serves HTTP on `port` of the client's addresses, as long as the process lives.
    pub fn upstream(&self, port: u16) -> Result<Upstream> {
        let calls = Arc::<Mutex<Vec<_>>>::default();
        let upstream = Upstream(Arc::clone(&calls));
        self.serve(port, move |stream| answer(stream, &calls))?;
        Ok(upstream)
    }

    /// Serves TLS on `port`; each handshake begins after `delay`.
    pub fn tls_upstream(&self, port: u16, delay: Duration) -> Result<TlsUpstream> {
        let made = rcgen::generate_simple_self_signed(vec!["upstream".to_owned()])?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config = ServerConfig::builder().with_no_client_auth();
        let config = Arc::new(config.with_single_cert(vec![made.cert.der().clone()], key)?);
        let received = Arc::<Mutex<Vec<u8>>>::default();
        let upstream = TlsUpstream(Arc::clone(&received));
        self.serve(port, move |stream| {
            thread::sleep(delay);
            let session = ServerConnection::new(Arc::clone(&config)).map_err(io::Error::other)?;
            let mut stream = StreamOwned::new(session, stream);
            let mut bytes = [0; 1024];
            loop {
                let got = stream.read(&mut bytes)?;
                if got == 0 {
                    return Ok(());
                }
                received.lock().unwrap().extend_from_slice(&bytes[..got]);
            }
        })?;
        Ok(upstream)
    }

    /// Accepts on `port` in the client's namespace, each connection in a thread of its own.
    fn serve(
        &self,
        port: u16,
        each: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let listener = self.client.run(|| TcpListener::bind(("::", port)))?;
        let each = Arc::new(each);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let each = Arc::clone(&each);
                thread::spawn(move || each(stream));
            }
        });
        Ok(())
    }
}

fn answer(stream: TcpStream, calls: &Mutex<Vec<(Instant, String)>>) -> io::Result<()> {
    let mut to = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    loop {
        let request = http::read(&mut from)?;
        calls.lock().unwrap().push((Instant::now(), request.request().1.to_owned()));
        http::respond(&mut to, "200 OK", b"")?;
    }
}
