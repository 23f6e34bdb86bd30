//! As much of HTTP/1.1 as the fixture needs on both ends.

use std::fmt::Display;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A request or a response.
#[derive(Debug)]
pub struct Message {
    /// The first line, without its end.
    pub start: String,
    /// The connection ends after this message.
    pub close: bool,
    pub body: Vec<u8>,
}

impl Message {
    /// The method and the target of a request.
    pub fn request(&self) -> (&str, &str) {
        let mut words = self.start.split(' ');
        (words.next().unwrap_or_default(), words.next().unwrap_or_default())
    }

    /// The status of a response; 0 when it has none.
    pub fn status(&self) -> u16 {
        self.start.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0)
    }
}

/// Reads one message with a Content-Length, in chunks, or without a body. An end before the first byte is `UnexpectedEof`.
pub fn read(from: &mut impl BufRead) -> io::Result<Message> {
    let start = line(from)?;
    let (mut length, mut close, mut chunked) = (0, false, false);
    loop {
        let header = line(from)?.to_ascii_lowercase();
        match header.split_once(':').map(|(name, value)| (name, value.trim())) {
            None => break,
            Some(("content-length", value)) => length = value.parse().map_err(io::Error::other)?,
            Some(("connection", "close")) => close = true,
            Some(("transfer-encoding", "chunked")) => chunked = true,
            Some(_) => {}
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    while chunked {
        let length = usize::from_str_radix(&line(from)?, 16).map_err(io::Error::other)?;
        let before = body.len();
        body.resize(before + length, 0);
        from.read_exact(&mut body[before..])?;
        line(from)?;
        chunked = length > 0;
    }
    Ok(Message { start, close, body })
}

fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    if line.ends_with('\n') {
        Ok(line.trim_end().to_owned())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Writes a response with a body.
pub fn respond(to: &mut impl Write, status: &str, body: &[u8]) -> io::Result<()> {
    let mut out = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
    out.extend_from_slice(body);
    to.write_all(&out)
}

/// Writes the last response of a connection.
pub fn respond_last(to: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    to.write_all(&[head.as_bytes(), body].concat())
}

/// Writes a GET for a kept-alive connection.
pub fn get(to: &mut impl Write, host: impl Display, path: &str) -> io::Result<()> {
    to.write_all(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n").as_bytes())
}

/// One request on a connection of its own; the status of the answer.
pub fn call(method: &str, addr: SocketAddr, path: &str, at_most: Duration) -> io::Result<u16> {
    let mut stream = TcpStream::connect_timeout(&addr, at_most)?;
    stream.set_read_timeout(Some(at_most))?;
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: {addr}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut stream = BufReader::new(stream);
    let start = line(&mut stream)?;
    // Nobody wants the body, but the server shall not see a reset.
    stream.read_to_end(&mut Vec::new())?;
    Ok(Message { start, close: true, body: Vec::new() }.status())
}

/// One GET on a connection of its own; the answer.
pub fn fetch(addr: SocketAddr, path: &str, at_most: Duration) -> io::Result<Message> {
    let mut stream = TcpStream::connect_timeout(&addr, at_most)?;
    stream.set_read_timeout(Some(at_most))?;
    get(&mut stream, addr, path)?;
    read(&mut BufReader::new(stream))
}

/// `http://ADDRESS:PORT/path` as the address and the path.
pub fn parse(url: &str) -> Option<(SocketAddr, &str)> {
    let rest = url.strip_prefix("http://")?;
    let at = rest.find('/')?;
    Some((rest[..at].parse().ok()?, &rest[at..]))
}
