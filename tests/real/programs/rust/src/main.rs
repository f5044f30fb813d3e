//! tokens FOLDER FILE: what the crate gives for the texts of a file of ids (tests/real/languages.py), a line each.

use std::error::Error;
use std::sync::Arc;

use quantmoe_text::{TextStream, TextTokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let tokenizer = Arc::new(TextTokenizer::open(&args[1])?);
    for line in std::fs::read_to_string(&args[2])?.lines() {
        let text = String::from_utf8(base64::decode(line.split('\t').next().unwrap_or(""))?)?;
        let ids = tokenizer.encode(&text, true)?;
        let whole = tokenizer.decode(&ids, false)?;
        let bare = joined(&tokenizer.encode(&text, false)?);
        let wrong = wrong(&tokenizer, &ids, &whole)?;
        println!(
            "{}\t{}\t{bare}\t{}\t{wrong}",
            base64::encode(&text),
            joined(&ids),
            base64::encode(&whole)
        );
    }
    Ok(())
}

/// Return at how many places a stream that begins there is not the rest of the text.
fn wrong(
    tokenizer: &Arc<TextTokenizer>,
    ids: &[i64],
    whole: &str,
) -> Result<usize, Box<dyn Error>> {
    let mut wrong = 0;
    for cut in 0..=ids.len() {
        let mut stream = TextStream::new(Arc::clone(tokenizer), Vec::new(), &ids[..cut])?;
        let mut text = tokenizer
            .decode(&ids[..cut], false)?
            .trim_end_matches('\u{fffd}')
            .to_owned();
        for &id in &ids[cut..] {
            text += &stream.push(id)?;
        }
        text += &stream.end()?;
        wrong += usize::from(text != whole);
    }
    Ok(wrong)
}

fn joined(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")
}
