//! As fields.cpp does: `fields request FILE`, `fields reply FILE`, `fields reset ADDRESS TIMES`, and of streams `sample`,
//! `window`, `stream` and `full`. Beside it
//! `fields several FILE` writes a request of two observations and `fields report FILE` a robot's report, both as well
//! to a server with `fields live ADDRESS KEY`.

use std::time::Duration;

use sinew_client::{messages, Client, Error, Image, Observation, Options, Report, Stream, Window};

const PIXELS: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 255];
const FLOATS: [f32; 6] = [0.0, 0.25, 0.5, 1.0, 0.1, 0.9];
const FILE: [u8; 3] = [0xff, 0xd8, 0xff];

fn everything() -> Observation<'static> {
    Observation {
        images: vec![Image::rgb("front", &PIXELS, 2, 2), Image::file("wrist", &FILE)],
        state: vec![0.1, -2.0, 3e8],
        prompt: "grüß dich".into(),
        tokens: vec![1, 300, 70000],
        noise: vec![0.5, -0.5],
        seed: Some(0),
        solver_steps: Some(10),
        session: "arm".into(),
        time: Some(12.5),
        deadline_ms: Some(100.0),
        previous: vec![1.0, 2.0, 3.0, 4.0],
        delay: Some(0),
        horizon: Some(2),
        rtc: "guided".into(),
        schedule: "exp".into(),
        beta: Some(5.0),
        advantage: Some(String::new()),
        guidance_scale: Some(1.5),
        adapter: "kitchen".into(),
        subtask: true,
        text_only: true,
        question: "what?".into(),
        text_tokens: 16,
    }
}

fn several() -> [Observation<'static>; 2] {
    let small = Observation {
        images: vec![Image::rgb("front", &PIXELS, 1, 4), Image::float("wrist", &FLOATS, 2, 1)],
        state: vec![0.5],
        tokens: vec![-1],
        ..Observation::default()
    };
    [Observation { deadline_ms: None, ..everything() }, small]
}

fn report() -> Report {
    Report {
        run: 1 << 63,
        name: "arm".into(),
        state: "moves".into(),
        reason: "none".into(),
        hz: 50.0,
        rate_hz: 49.5,
        rows_hz: 48.0,
        age_p50_ms: Some(0.0),
        age_p95_ms: Some(80.5),
        steps: 300,
        late: 1,
        skipped: 2,
        held: vec![("paused".into(), 3), ("late".into(), 0)],
        clipped_commands: 4,
        clipped: vec![("velocity".into(), 4)],
        limits: vec!["range".into(), "velocity".into()],
        failed_requests: 5,
        takeovers: 6,
        steps_by_hand: 7,
        episodes: Some(2),
        successes: Some(0),
        arm: vec![0.0, 0.5, 1.0],
    }
}

fn reply(bytes: &[u8]) -> Result<String, Error> {
    let seen = Observation { adapter: "kitchen".into(), ..Observation::default() };
    let chunk = messages::decode_chunk(bytes, 7, &seen, &Options::default())?;
    let numbers: Vec<String> = chunk.actions.iter().map(f32::to_string).collect();
    let timing = &chunk.timing;
    Ok(format!(
        "{} {} {} | {} {} {:.17} {} {} {} | {} {} {} {}",
        chunk.rows, chunk.dim, numbers.join(" "), chunk.seed.unwrap_or(0), chunk.session, chunk.time.unwrap_or(0.0),
        chunk.text, chunk.adapter, chunk.warnings.first().map_or("", String::as_str), timing.total_ms,
        timing.step_ms.last().unwrap_or(&0.0), timing.text_ms, timing.batch,
    ))
}

fn nodes(found: &Window) -> String {
    let numbers: Vec<String> = found.actions.iter().map(f32::to_string).collect();
    format!("{} {} {} {}", found.step, found.rows, found.dim, numbers.join(" "))
}

fn window(bytes: &[u8]) -> Result<String, Error> {
    let found = messages::decode_window(bytes, 0, &Options::default())?.unwrap_or_default();
    Ok(format!(
        "{} | {:.17} {:.17} {} {} {} {} {} {} {} {}",
        nodes(&found), found.sample_time, found.frame_time, found.prefix_age_ms, found.sensor_age_ms, found.head_ms,
        found.run, found.request_id, found.label, found.text, found.said,
    ))
}

fn stream(address: &str, key: &str) -> Result<(), Error> {
    let options = Options { api_key: key.into(), timeout: Duration::from_secs(60), ..Options::default() };
    let mut robot = Stream::new(address, 100.0, options, "")?;
    let pixels = vec![7; 16 * 16 * 3];
    let mut seen = Observation {
        images: vec![Image::rgb("front", &pixels, 16, 16)],
        state: vec![0.5, 0.25], prompt: "go".into(), session: "arm".into(), seed: Some(7), time: Some(0.0),
        ..Observation::default()
    };
    for turn in 0..3 {
        seen.state.truncate(if turn == 2 { 1 } else { 2 });
        let found = robot.send(&seen, None).and_then(|_| robot.next_window(Duration::from_secs(60)));
        told(found.map(|found| found.unwrap_or_default()).map(|found| format!("{} of {}", nodes(&found), found.request_id)));
        if turn < 2 {
            robot.end()?;
        }
    }
    seen.time = None;
    told(robot.send(&seen, None).map(|_| String::new()));
    Ok(())
}

fn full(address: &str) -> Result<(), Error> {
    let mut robot = Stream::new(address, 100.0, Options::default(), "")?;
    let pixels = vec![0; 1024 * 1024 * 3];
    let images = vec![Image::rgb("front", &pixels, 1024, 1024)];
    let seen = Observation { images, time: Some(0.0), ..Observation::default() };
    let mut sent = 0;
    for _ in 0..30 {
        sent += usize::from(robot.send(&seen, None)?);
    }
    let none = robot.next_window(Duration::ZERO)?.is_none();
    println!("{}", if (4..30).contains(&sent) && none { "dropped" } else { "sent" });
    Ok(())
}

fn told(found: Result<String, Error>) {
    println!("{}", found.unwrap_or_else(|error| error.to_string()));
}

fn live(address: &str, key: &str) -> Result<(), Error> {
    let options = Options { api_key: key.into(), timeout: Duration::from_secs(60), ..Options::default() };
    let mut robot = Client::with_options(address, options.clone())?;
    println!("{}", robot.metadata()?);
    println!("{}", robot.health()?);
    robot.report("arm", &report())?;
    let pixels = vec![7; 48 * 64 * 3];
    let images = vec![Image::rgb("front", &pixels, 48, 64)];
    let good = Observation { images, state: vec![0.5, 0.25], prompt: "go".into(), ..Observation::default() };
    let bad = Observation { state: vec![0.5], ..good.clone() };
    let row = |chunk: sinew_client::Chunk| format!("{:?} {}", chunk.actions, chunk.round_trip > Duration::ZERO);
    let other = Observation { state: vec![0.25, 0.0], ..good.clone() };
    for answer in robot.infer_all(&[good.clone(), bad, other], Some(60e3))? {
        told(answer.map(row));
    }
    told(robot.infer_all(&[], None).map(|_| String::new()));
    for wrong in [
        Observation { images: vec![], ..good.clone() },
        Observation { images: vec![Image::rgb("front", &pixels, 2, 2)], ..good.clone() },
        Observation { images: vec![Image::file("front", &[])], ..good.clone() },
        Observation { images: vec![Image::float("front", &FLOATS, 1, 1)], ..good.clone() },
        Observation { images: vec![Image::float("front", &[0.5, f32::NAN, 2.0], 1, 1)], ..good.clone() },
    ] {
        told(robot.infer(&wrong).map(row));
        told(robot.infer_all(&[wrong], None).map(|_| String::new()));
    }
    for (low, high) in [(Some(vec![2.0; 2]), None), (None, Some(vec![f32::NAN; 2])), (Some(vec![0.0]), None)] {
        let mut limited = Client::with_options(address, Options { low, high, ..options.clone() })?;
        told(limited.infer(&good).map(row));
    }
    robot.set_timeout(Duration::ZERO);
    told(robot.metadata());
    for nowhere in ["udp://host:1", "host", "host:0", "host:65536", "host:+1", ":1", "ipc://relative"] {
        told(Client::connect(nowhere).map(|_| String::new()));
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [verb, rest @ ..] = &given[..] else { return Err("a verb".into()) };
    match verb.as_str() {
        "request" => std::fs::write(&rest[0], messages::encode_infer(&everything(), 1 << 40, "key", "policy")?)?,
        "several" => {
            let bytes = messages::encode_infer_all(&several(), 1 << 40, None, "key", "policy")?;
            std::fs::write(&rest[0], bytes)?;
        }
        "report" => {
            let said = report();
            let kind = messages::Control::Report(&said);
            std::fs::write(&rest[0], messages::encode_control(kind, 7, "arm", "key", "policy"))?;
        }
        "sample" => {
            let pace = messages::Pace { rate: 30.0, frame_time: Some(12.25), interpolation: "hold".into() };
            std::fs::write(&rest[0], messages::encode_sample(&everything(), &pace, 1 << 40, "key", "policy")?)?;
        }
        "reply" | "window" => {
            let whole = std::fs::read(&rest[0])?;
            let read = if verb == "reply" { reply } else { window };
            told(read(&whole));
            (0..whole.len()).for_each(|size| told(read(&whole[..size]))); // cut off anywhere
        }
        "stream" => stream(&rest[0], &rest[1])?,
        "full" => full(&rest[0])?,
        "live" => live(&rest[0], &rest[1])?,
        _ => {
            let mut robot = Client::connect(&rest[0])?;
            robot.set_timeout(Duration::from_secs_f64(rest[2].parse()?));
            for _ in 0..rest[1].parse::<u32>()? {
                told(robot.reset("arm").map(|()| "one".into()));
            }
        }
    }
    Ok(())
}
