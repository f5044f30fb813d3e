mod common;

use std::fs;

use common::{all, folder, fresh, greedy, model, Copy};
use quantmoe::{Error, TokenCache};

const PROMPT: [i64; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

#[test]
fn a_loaded_prompt_goes_on() {
    for name in ["plain", "hybrid"] {
        let (model, copy) = (model(name), Copy::new(&folder(name), &[]));
        let path = copy.0.join("prompt.state");
        let mut cache = TokenCache::going_back(&model).unwrap();
        all(cache.generate(&PROMPT, &greedy(6)).unwrap());
        cache.save(&path).unwrap();
        if let (Some(saved), "hybrid") = (std::env::var_os("QUANTMOE_SAVED"), name) {
            fs::copy(&path, saved).unwrap(); // for Python (tests/packages/helpers.py)
        }
        for (ids, plain, hybrid) in
            [([cache.tokens(), &[20]].concat(), 17, 17), ([&PROMPT[..], &[20, 21]].concat(), 12, 12)]
        {
            let mut loaded = TokenCache::load(&model, &path).unwrap();
            assert_eq!(loaded.tokens(), cache.tokens());
            let kept = loaded.keep(&ids).unwrap();
            assert_eq!(kept, if name == "hybrid" { hybrid } else { plain });
            assert_eq!(all(loaded.generate(&ids[kept..], &greedy(6)).unwrap()), fresh(&model, &ids, 6));
        }
    }
}

#[test]
fn wrong_files_are_refused_by_name() {
    let (plain, hybrid, copy) = (model("plain"), model("hybrid"), Copy::new(&folder("plain"), &[]));
    let path = copy.0.join("prompt.state");
    let mut cache = TokenCache::new(&plain).unwrap();
    assert!(cache.save(&path).unwrap_err().to_string().contains("has no tokens to save"));
    all(cache.generate(&PROMPT, &greedy(2)).unwrap());
    cache.save(&path).unwrap();
    let refused = |model, expected: &str| {
        let error = TokenCache::load(model, &path).err().unwrap();
        assert!(error.to_string().starts_with(&format!("{}: {expected}", path.display())), "{error}");
    };
    refused(&hybrid, "saved with another model");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() - 9;
    bytes[at] ^= 1;
    fs::write(&path, &bytes).unwrap();
    refused(&plain, "was altered or is damaged");
    for (length, expected) in [(5, "5 bytes, expected a safetensors file"), (100, "a header of")] {
        fs::write(&path, &bytes[..length]).unwrap();
        refused(&plain, expected);
    }
    fs::write(&path, [&4u64.to_le_bytes()[..], b"{]  "].concat()).unwrap();
    refused(&plain, "corrupt header");
    let nowhere = copy.0.join("nowhere/prompt.state");
    assert!(matches!(cache.save(&nowhere), Err(Error::File(path, _)) if path == nowhere));
    assert!(fs::read_dir(&copy.0).unwrap().all(|file| !file.unwrap().path().to_string_lossy().ends_with(".partial")));
}
