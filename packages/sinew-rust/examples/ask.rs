//! ask ADDRESS PROMPT --image CAMERA=FILE ... --state 0.1,0.2 \[--seed N\] \[--key KEY, else SINEW_API_KEY\]
//! \[--times N\] \[--rate HZ\] \[--bytes FILE\]
//!
//! An example program. It sends one request, or N requests, and prints the actions of each chunk. The exit status is 0,
//! or 1 after an error, which it prints with its code.
//!
//! FILE is a PPM (P6), JPEG or PNG file. The pixels of a PPM file are sent uncompressed.
//! --rate HZ opens a stream and sends HZ samples per second. The program ends after N windows, and prints one line for
//! each window: the first step and the nodes.
//! --bytes FILE writes the first request to FILE and sends nothing.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, Instant};

use sinew_client::{messages, Client, Image, Observation, Options, Stream};

fn main() -> ExitCode {
    match ask(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn ask(given: &[String]) -> Result<(), Box<dyn Error>> {
    let [address, prompt, rest @ ..] = given else {
        return Err("expected ADDRESS PROMPT --image CAMERA=FILE ... --state NUMBER,NUMBER [usage]".into());
    };
    let (mut options, mut files, mut times, mut bytes) = (Options::default(), Vec::new(), 1, None);
    let mut rate = 0.0;
    options.api_key = std::env::var("SINEW_API_KEY").unwrap_or_default();
    let mut seen = Observation { prompt: prompt.clone(), ..Observation::default() };
    for pair in rest.chunks(2) {
        let (option, value) = (pair[0].as_str(), pair.get(1).map_or("", String::as_str));
        match option {
            "--image" => {
                let expected = || format!("--image: expected CAMERA=FILE, got {value} [usage]");
                files.push(value.split_once('=').ok_or_else(expected)?);
            }
            "--state" => seen.state = value.split(',').map(|each| number(option, each)).collect::<Result<_, _>>()?,
            "--seed" => seen.seed = Some(number(option, value)?),
            "--times" => times = number(option, value)?,
            "--rate" => rate = number(option, value)?,
            "--key" => options.api_key = value.into(),
            "--bytes" => bytes = Some(value),
            _ => return Err(format!("unknown option {option} [usage]").into()),
        }
    }
    let read = |(camera, path): &(&str, &str)| {
        std::fs::read(path).map_err(|error| {
            format!("images.{camera}: expected a file, got {path}, which cannot be read: {error} [bad_observation]")
        })
    };
    let contents = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    for ((camera, path), content) in files.iter().zip(&contents) {
        seen.images.push(picture(camera, path, content)?);
    }
    if let Some(path) = bytes {
        std::fs::write(path, messages::encode_infer(&seen, 1, &options.api_key, "")?)?;
        return Ok(());
    }
    if rate > 0.0 {
        return stream(Stream::new(address, rate, options, "")?, seen, f64::from(rate), times);
    }
    let mut robot = Client::with_options(address, options)?;
    let mut out = std::io::stdout().lock(); // println! would panic if the pipe is closed
    for _ in 0..times {
        let chunk = robot.infer(&seen)?;
        for row in &chunk {
            writeln!(out, "{}", row.iter().map(f32::to_string).collect::<Vec<_>>().join(" "))?;
        }
        chunk.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    }
    Ok(())
}

/// Send samples at the given rate, and print the given number of windows.
fn stream(mut robot: Stream, mut seen: Observation<'_>, rate: f64, times: u32) -> Result<(), Box<dyn Error>> {
    robot.open()?;
    let (begun, mut out, mut windows) = (Instant::now(), std::io::stdout().lock(), 0);
    for sample in 1.. {
        seen.time = Some(begun.elapsed().as_secs_f64());
        robot.send(&seen, None)?;
        let due = begun + Duration::from_secs_f64(f64::from(sample) / rate);
        while let Some(window) = robot.next_window(due.saturating_duration_since(Instant::now()))? {
            let nodes: Vec<_> = window.actions.iter().map(f32::to_string).collect();
            writeln!(out, "{}: {}", window.step, nodes.join(" "))?;
            windows += 1;
            if windows == times {
                return Ok(());
            }
            let late = begun.elapsed().as_secs_f64() - window.sample_time;
            seen.delay = Some(1 + (late * rate) as u32); // assume that the next window is as late
        }
    }
    Ok(())
}

fn number<T: FromStr>(option: &str, text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|_| format!("{option}: expected a number, got {text} [usage]"))
}

/// Return an image with the pixels of a PPM file, or with the bytes of a file that the server decodes.
fn picture<'a>(camera: &str, path: &str, content: &'a [u8]) -> Result<Image<'a>, String> {
    if !content.starts_with(b"P6") {
        return Ok(Image::file(camera, content));
    }
    let whole = || format!("{path}: expected a whole PPM of 8 bits [bad_observation]");
    let mut numbers = [0_u32; 3]; // width, height, largest value
    let mut at = 2;
    for number in &mut numbers {
        let blanks = content[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let digits = content[at + blanks..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let text = String::from_utf8_lossy(&content[at + blanks..at + blanks + digits]);
        *number = text.parse().map_err(|_| whole())?;
        at += blanks + digits;
    }
    let [width, height, 255] = numbers else { return Err(whole()) };
    let pixels = content.get(at + 1..).ok_or_else(whole)?;
    Ok(Image::rgb(camera, pixels, height, width))
}
